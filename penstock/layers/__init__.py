"""Token mixers and channel mixers as ``nn.Module``, one file per architecture."""

"""Other projects' functions on Penstock's operators: ``fla``, ``flash_rwkv`` and ``transformers``. See docs/compat.md."""

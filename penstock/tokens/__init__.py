"""What all families of operators over tokens share: axes, decays, packed sequences, pools of states, pieces of updates in place."""

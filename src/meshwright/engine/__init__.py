"""Plays one rank's list of actions; knows F, B, PACK, UNPACK, STEP, and no technique."""

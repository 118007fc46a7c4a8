"""Rounds of committed tokens: the FLy rule, sampling, verification and the loop. Pure tensors and protocols."""

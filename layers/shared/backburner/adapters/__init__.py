"""What the core needs from outside, on AWS: one service each."""

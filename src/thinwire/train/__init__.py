"""Models and data to train with, small enough for one machine and found on any."""

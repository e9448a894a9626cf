"""Tests of the network, and the naive versions they compare it with."""

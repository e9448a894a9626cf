"""How good is it: metrics of expression, position, space and clusters, and the baselines."""

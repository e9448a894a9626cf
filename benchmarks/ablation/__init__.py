"""The ablation: one budget, several configurations and seeds, and what differs beyond the noise."""

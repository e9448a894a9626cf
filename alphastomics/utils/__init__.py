"""Types that cross rooms, and metrics."""

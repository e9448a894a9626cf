"""Types that several packages use, and metrics."""

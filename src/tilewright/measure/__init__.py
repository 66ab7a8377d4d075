"""Measurements: times, errors against float64, profiler recordings, peak memory; and inputs for them."""

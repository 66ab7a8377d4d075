"""What is measured: times, results against float64, recordings under a profiler, memory; and the inputs for it."""

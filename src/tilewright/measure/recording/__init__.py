"""Records some steps of a program with a profiler: which steps, with which ranges, within a bound of memory."""

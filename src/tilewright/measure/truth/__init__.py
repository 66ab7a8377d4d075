"""The correctness of results: errors against float64, bounded by eager's own."""

"""The operator table: self and total time, and findings in sentences."""

"""Readers of trace formats, one file each, which fill table `staged`."""

"""One file a format: each fills table `staged`."""

"""Properties of devices: detection, measured ceilings, datasheet profiles, the floor of a kernel on them."""

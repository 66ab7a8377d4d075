"""What a device can do: detection, measured ceilings, datasheet profiles, the floor of a kernel on them."""

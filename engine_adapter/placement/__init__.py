"""Where a model lies: its devices, the number of its blocks on each, and what `auto` means on each kind of device."""

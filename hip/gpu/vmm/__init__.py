"""Virtual memory management: address space to which physical memory is added, and from which it is taken away."""

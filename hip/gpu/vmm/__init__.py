"""Virtual memory management: address space that physical memory is put under."""

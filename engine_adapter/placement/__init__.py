"""Which devices a model lies on, how many of its blocks on each, and what each kind of device decides for `auto`."""

"""Measures how fast this machine moves and computes, once: what `expertier plan` predicts speeds from.

engine_rates.py   the engine's own rates: a layer, a byte of weights, a missed expert from L2 and the page cache
file_rates.py     the page cache and the disk under the model, cold and direct
device_rates.py   a device's link, the copies between slots, and reading ids back
probe.py          all of it as one document, saved in the cache folder
"""

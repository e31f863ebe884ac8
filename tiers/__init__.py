"""The tiers that hold expert bytes, and the manager that lends them out. README.md beside this file lists the rooms."""

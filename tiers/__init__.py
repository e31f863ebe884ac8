"""The tiers that hold a model's expert bytes, and the manager that leases them. README.md here lists the rooms."""

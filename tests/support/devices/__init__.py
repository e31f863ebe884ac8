"""What every device must do, and tiers on devices that are fake or real."""

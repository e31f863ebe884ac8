"""Tools of the user's own llama.cpp, with the tiers in their process."""

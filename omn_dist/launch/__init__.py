"""Starting a run on one machine or many: who takes part, where they meet, what must be right before any of them starts."""

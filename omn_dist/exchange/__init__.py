"""Moving directions to their owners and updates back: the only part that talks on a process group during a step."""

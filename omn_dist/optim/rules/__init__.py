"""Update rules, one file each; ``rule.py`` is the protocol that they follow."""

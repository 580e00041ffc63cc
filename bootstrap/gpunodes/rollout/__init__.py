"""The pure part of roll-outs: order, budgets, canaries, windows, the stages of one machine, the roll-out's record."""

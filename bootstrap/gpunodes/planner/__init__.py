"""Pure knowledge: tables with their sources, and what follows from them."""

"""The planner: tables of facts with their sources, and the decisions that follow from them. Pure."""

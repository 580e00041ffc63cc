"""Tests of the code that runs on machines; one file for each of its subjects."""

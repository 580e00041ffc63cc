"""Collects raw health facts of a GPU machine in one run. The controller evaluates them.

Standard library only, Python 3.6 and newer: modules import it, and the controller sends it over SSH as a program
(``document.py``). It changes nothing on the machine and loads no kernel module. docs/json.md describes the facts.
"""

"""Collects raw health facts of a GPU machine in one run. The controller evaluates them.

Standard library only, Python 3.6 and newer: modules import it, and the controller sends it over SSH as a program
(``document.py``). It changes nothing on the machine and loads no kernel module.

On a machine whose driver hangs, harmless reads block for ever. So every collector is a child process that reports each
fact as soon as it has it. The parent does nothing that could block: it enforces the deadline, and reports and leaves
behind a child that cannot be killed. docs/json.md describes the facts.
"""

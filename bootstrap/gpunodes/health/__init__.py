"""Finds what is wrong with a GPU machine from its logs, nvidia-smi output and facts: pure, standard library only.

The flow: ``sources`` recognises and unpacks files, ``scan`` finds the relevant lines with the ``patterns`` of log
lines, ``smi`` reads nvidia-smi's output, ``rules`` turns all of it into findings, and ``judge`` into a verdict.
"""

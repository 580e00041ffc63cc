#!/bin/sh
# Adds swap to the machine, now and at every boot.
set -eu
fallocate --length 64MiB /swapfile
chmod 0600 /swapfile
mkswap /swapfile
swapon /swapfile
echo '/swapfile none swap sw 0 0' >>/etc/fstab

"""kubeadm init, join and reset; each can be interrupted at any point and run again."""

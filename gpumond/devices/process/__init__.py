"""Facts about processes from /proc, cgroups, container runtimes and the kubelet."""

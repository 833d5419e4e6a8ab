# After the removal: what after-install.sh and the daemon created, except /var/lib/gpumond and the user who owns it.
rm -rf /opt/gpumond /opt/gpumond.d /run/gpumond /run/gpumond-api
rmdir /etc/gpumond/secrets /etc/gpumond 2>/dev/null || true
[ ! -d /run/systemd/system ] || systemctl daemon-reload

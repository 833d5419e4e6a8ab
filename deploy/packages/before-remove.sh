# Before the removal, and not before an upgrade.
if [ -d /run/systemd/system ]; then
  systemctl disable --now gpumond.socket gpumond.service || true
else
  systemctl disable gpumond.socket gpumond.service || true
fi

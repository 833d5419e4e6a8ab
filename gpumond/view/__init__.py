"""What `status`, `top`, `fleet` and the web UI show. No I/O."""

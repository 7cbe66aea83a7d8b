"""Jobs in a cluster, seen through the API server with the user's own kubeconfig; nothing in it imports the operator."""

"""Training memory: predicted without a GPU, dissected to the byte, measured where there is a device."""

"""How long a plan takes: devices, seconds of a matrix, a simulated step, and where teams pay."""

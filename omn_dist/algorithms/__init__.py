"""Update rules as pure functions: values in, values out; no process group, no global switch."""

"""Studies before a run: models as shapes, plans over numbers of ranks, predicted steps, tables and pictures. No process group."""

"""The laboratory: training runs, experiments, studies, pictures, reports and the command. It needs `dohyo[cli]`."""

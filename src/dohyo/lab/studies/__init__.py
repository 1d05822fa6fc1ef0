"""The paper's studies, one for each table or figure: `dohyo reproduce NAME`."""

from typing import Any

from dohyo.lab.folder import Conclusion, Picture, Table
from dohyo.lab.studies.annealing import Annealing
from dohyo.lab.studies.clipping import Clipping
from dohyo.lab.studies.convergence import Convergence
from dohyo.lab.studies.estimates import Estimates
from dohyo.lab.studies.funnel import Funnel
from dohyo.lab.studies.qpbo import Policies
from dohyo.lab.studies.study import Study, StudyConfig, reproduce
from dohyo.lab.studies.table1 import Table1

__all__ = ["STUDIES", "Conclusion", "Picture", "Study", "StudyConfig", "Table", "reproduce"]

STUDIES: dict[str, type[Study[Any]]] = {
    study.name: study for study in (Convergence, Estimates, Funnel, Policies, Table1, Clipping, Annealing)
}

"""Analysis of the measurements: statistics, models of scaling, reports and plots."""

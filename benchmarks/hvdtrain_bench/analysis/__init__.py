"""What measurements say: statistics, models of scaling, reports and plots."""

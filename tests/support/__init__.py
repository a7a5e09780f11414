"""What tests share: cases, naive answers, models, faults. A test says `from support.cases import ALL_SPECS`."""
